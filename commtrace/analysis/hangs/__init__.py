"""Find why a job hangs or ended: where communication stopped, which ranks are missing, which failed first."""
