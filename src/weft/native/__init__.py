"""The name under which images build the native library."""
