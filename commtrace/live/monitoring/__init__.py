"""Find stragglers while the job runs, from the reports of all ranks."""
