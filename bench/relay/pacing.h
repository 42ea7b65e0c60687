/* Who is to be served next: a heap of moments. */
#ifndef PACING_H
#define PACING_H

#include "common.h"

/* The first member of whatever is paced, so that one can be cast to the other. */
struct paced {
  uint64_t due_ns;
  size_t place; /* 1-based in the heap; 0 when it is not in it. */
};

struct heap {
  struct paced **items; /* 1-based. */
  size_t count, capacity;
};

static inline void heap_set(struct heap *heap, size_t place, struct paced *item) {
  heap->items[place] = item;
  item->place = place;
}

static inline void heap_up(struct heap *heap, size_t place) {
  struct paced *item = heap->items[place];
  for (; place > 1 && heap->items[place / 2]->due_ns > item->due_ns; place /= 2)
    heap_set(heap, place, heap->items[place / 2]);
  heap_set(heap, place, item);
}

static inline void heap_down(struct heap *heap, size_t place) {
  struct paced *item = heap->items[place];
  for (;;) {
    size_t child = 2 * place;
    if (child > heap->count) break;
    if (child < heap->count && heap->items[child + 1]->due_ns < heap->items[child]->due_ns)
      child++;
    if (heap->items[child]->due_ns >= item->due_ns) break;
    heap_set(heap, place, heap->items[child]);
    place = child;
  }
  heap_set(heap, place, item);
}

static inline void heap_add(struct heap *heap, struct paced *item) {
  if (heap->count + 1 >= heap->capacity) {
    heap->capacity = heap->capacity ? 2 * heap->capacity : 1024;
    heap->items = need(realloc(heap->items, heap->capacity * sizeof *heap->items));
  }
  heap->items[++heap->count] = item;
  heap_up(heap, heap->count);
}

static inline void heap_remove(struct heap *heap, struct paced *item) {
  size_t place = item->place;
  if (place == 0) return;
  struct paced *moved = heap->items[heap->count--];
  item->place = 0;
  if (moved == item) return;
  heap->items[place] = moved;
  heap_up(heap, place);
  heap_down(heap, moved->place);
}

static inline uint64_t heap_next_ns(const struct heap *heap) {
  return heap->count ? heap->items[1]->due_ns : UINT64_MAX;
}

/* When the first token of a paced answer is due: at once, or at the next common tick. */
static inline uint64_t first_due_ns(const struct pace *pace) {
  uint64_t now = now_ns();
  if (!pace->together || pace->pace_ns == 0) return now;
  return (now / pace->pace_ns + 1) * pace->pace_ns;
}

#endif
