"""What a job costs: time, arithmetic and memory of a step, from shapes, formulas or a profile."""
