"""Match operations of different ranks to communications, with their roles and missing members."""
