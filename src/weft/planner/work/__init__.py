"""The work of a step: bytes and operations of a rank, and the seconds that they take."""
