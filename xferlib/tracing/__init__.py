"""Recording what the copies and the compute of a process did, on one clock, and saying why they did not overlap."""
