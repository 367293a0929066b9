"""Tests of a whole cluster; a package, so that its one cluster ends with the last of them."""
