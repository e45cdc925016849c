"""Where communication is captured: process groups, their operations, and who waits for them."""
