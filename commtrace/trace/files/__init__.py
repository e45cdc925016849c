"""Write the files of a run, keep them within their budget, check them, and read them back."""
