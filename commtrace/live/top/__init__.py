"""Make the frames of ``commtrace top`` from the files or metrics of a running job."""
