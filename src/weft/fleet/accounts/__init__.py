"""Clients of a gateway: keys, rates, shares, prices, and the ledger of spent tokens."""
