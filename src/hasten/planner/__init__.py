"""Predict step time, memory and cost of a training on N devices, by arithmetic from one device's evidence."""
