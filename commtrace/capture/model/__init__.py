"""What a training loop does beside communication: modules, phases, optimizers, and where its steps end."""
