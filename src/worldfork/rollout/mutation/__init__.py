"""Small changes of Python programs, such as repair one-line defects. Pure functions of text: nothing is run."""
