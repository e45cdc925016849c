"""What is wrong with a job: causes of lost time, in words, and what to do about each."""
