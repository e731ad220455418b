"""The demonstration: recorded agents on a real model, once warm and once cold."""
