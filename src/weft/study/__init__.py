"""Studies of engines and plans: benchmarks, measurements, simulation, export."""
