"""One real worker recorded, two hundred replayed: what gives first on one Redis and one S3."""
