"""Who is slow, found while the job runs, from what all ranks report."""
