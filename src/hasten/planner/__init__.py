"""A planner on paper: step time, memory and cost on N devices, by arithmetic from one device's evidence."""
