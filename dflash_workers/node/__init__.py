"""One machine of the fleet: its GPUs found and checked, its model near, its processes kept alive.

Reading order: machine (which runs the rest), gpus, checks, disks; staged, fetching; installed,
presets, effective; lane, kept; folder, leaving.
"""
