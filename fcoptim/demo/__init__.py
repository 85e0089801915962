"""The demonstration: one training run on a real model, its masters cast by every rule side by side."""
