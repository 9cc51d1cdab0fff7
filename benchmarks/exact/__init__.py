"""Integer programs for small steps, solved by HiGHS: the oracle that planners are held against, and FlexSP."""
