"""Which drafter the fleet serves: tried on one engine, judged by live work, for all or for none."""
