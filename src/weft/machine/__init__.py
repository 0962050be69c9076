"""One machine: its hardware as data, its files, and the native library."""
