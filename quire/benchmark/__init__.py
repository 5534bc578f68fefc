"""What `quire bench` is made of: jobs, measuring, the report, other engines to compare with."""
