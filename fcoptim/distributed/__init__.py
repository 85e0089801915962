"""Many processes: sharded parameters (DTensors), agreement between ranks, global figures, gradient reduction."""
