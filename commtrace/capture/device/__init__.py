"""Time work on an accelerator without waiting for it, and read the state of the device."""
