"""What reads steps and models from outside: no request passes through here."""
