"""How work on an accelerator is timed without waiting for it, and how the device is doing."""
