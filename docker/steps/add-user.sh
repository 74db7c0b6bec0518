#!/bin/sh
# The user that every container runs as: no login, a home of its own, an id that volumes can name.
set -eu
useradd --uid 10001 --create-home --home-dir /home/fleet --shell /usr/sbin/nologin fleet
# Volumes that are mounted there take over their owner.
install --directory --owner fleet --group fleet /var/lib/fleet /home/fleet/.cache
