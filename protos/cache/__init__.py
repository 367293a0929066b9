"""Between the cache manager, routers, engines and operators."""
