"""Times work on an accelerator without waiting for it, and reads the state of the device."""
