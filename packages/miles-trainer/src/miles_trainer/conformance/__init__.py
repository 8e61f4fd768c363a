"""Golden vectors: computed through the public functions, compared exactly or within the stated tolerance."""
