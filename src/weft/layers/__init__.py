"""The pieces that models are made of, each born with its share."""
