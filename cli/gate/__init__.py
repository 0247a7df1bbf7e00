"""`tandem gate`: accuracy with a verdict, and what tells where it is lost."""
