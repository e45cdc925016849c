"""The pipeline of a job: its schedule, its bubble, and the plan that it followed."""
