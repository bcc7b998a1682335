"""What engine and simulator share: the rules of a rank's life that do not depend on which clock it lives by."""
