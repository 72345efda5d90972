"""Object stores: addresses, files and folders in them, retries, checked copies."""
