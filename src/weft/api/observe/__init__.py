"""Sight of one server: metrics, traces of requests, profiles, and the history that diagnoses read."""
