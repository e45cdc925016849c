"""The monitor: finds stragglers and hangs while the job runs, from reports of the ranks."""
