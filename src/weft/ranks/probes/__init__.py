"""Measurements that run on GPUs, in processes of their own; the only probes that import torch."""
