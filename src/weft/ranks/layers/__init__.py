"""Layers of a decoder, each constructed with its rank's share."""
