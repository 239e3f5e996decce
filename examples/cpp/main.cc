#include "keys.h"
#include "pool.h"
#include "index.h"
int main() {}
