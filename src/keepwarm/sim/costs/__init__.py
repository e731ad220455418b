"""What steps and moves cost in virtual time: one protocol, four ways to know."""
