"""Who is slow, found while the job runs, without any infrastructure: ranks tell each other through a TCPStore."""
