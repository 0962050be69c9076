"""One protocol to the ranks: threads of this process, or processes of their own."""
