"""Object stores: addresses, folders at them, retries, and the command that copies folders."""
