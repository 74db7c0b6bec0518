"""Campaigns: the real system against simulated engines, with a plan of what will go wrong."""
