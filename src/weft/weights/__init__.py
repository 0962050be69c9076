"""From checkpoint to parameters: readers, dequantisation, the loader."""
