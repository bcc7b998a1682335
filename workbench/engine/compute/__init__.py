"""What a rank computes, on the wall clock."""
