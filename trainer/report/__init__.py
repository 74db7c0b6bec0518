"""What a run was, on one page: gathered from S3 and Redis, drawn without a script or an asset."""
