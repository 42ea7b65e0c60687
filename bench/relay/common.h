/* What load generators and back ends share: clock, histogram, bytes, sockets, options, marks.
 *
 * Every program is one thread around one epoll: it has one core, which it shares, and must cost
 * less than what is measured.
 */
#ifndef COMMON_H
#define COMMON_H

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S 1000000000ull
#define NS_PER_US 1000ull

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fputc('\n', stderr);
  exit(1);
}

static inline void *need(void *memory) {
  if (memory == NULL) die("out of memory");
  return memory;
}

/* ---- Time ---------------------------------------------------------------------------------- */

static inline uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

/* CPU seconds that a process has used, threads that have ended included; 0 once it is gone. */
static inline double cpu_of(pid_t pid) {
  clockid_t clock;
  struct timespec t;
  if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &t) != 0) return 0;
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* The same of a comma-separated list of processes. */
static inline double cpu_of_all(const char *pids) {
  double sum = 0;
  while (*pids != '\0') {
    char *end;
    long pid = strtol(pids, &end, 10);
    if (end == pids) die("not a list of process ids: %s", pids);
    sum += cpu_of((pid_t)pid);
    pids = *end == ',' ? end + 1 : end;
  }
  return sum;
}

/* Waits for events until `until_ns`, on the clock of now_ns; UINT64_MAX waits for ever. */
static inline int wait_events(int poller, struct epoll_event *events, int most,
                              uint64_t until_ns) {
  if (until_ns == UINT64_MAX) return epoll_wait(poller, events, most, -1);
  uint64_t now = now_ns();
  uint64_t left = until_ns > now ? until_ns - now : 0;
  struct timespec timeout = {.tv_sec = (time_t)(left / NS_PER_S),
                             .tv_nsec = (long)(left % NS_PER_S)};
  return epoll_pwait2(poller, events, most, &timeout, NULL);
}

/* ---- Chance: xorshift, for prompts that differ ------------------------------------------------ */

static uint64_t chance_state = 88172645463325252ull;

static inline uint64_t chance(void) {
  chance_state ^= chance_state << 13;
  chance_state ^= chance_state >> 7;
  chance_state ^= chance_state << 17;
  return chance_state;
}

/* ---- Histogram: 64 buckets per power of two, so at most 1.6 % off ------------------------------ */

#define HISTOGRAM_STEPS 64

struct histogram {
  uint64_t counts[HISTOGRAM_STEPS * HISTOGRAM_STEPS];
  uint64_t total;
};

static inline void histogram_add(struct histogram *h, uint64_t value) {
  h->total++;
  if (value < HISTOGRAM_STEPS) {
    h->counts[value]++;
    return;
  }
  unsigned exponent = 63u - (unsigned)__builtin_clzll(value);
  unsigned step = (unsigned)(value >> (exponent - 6)) & (HISTOGRAM_STEPS - 1);
  h->counts[(exponent - 5) * HISTOGRAM_STEPS + step]++;
}

/* The middle of the bucket that holds the quantile; 0 of nothing. */
static inline double histogram_quantile(const struct histogram *h, double quantile) {
  uint64_t wanted = (uint64_t)(quantile * (double)h->total), seen = 0;
  for (unsigned i = 0; i < HISTOGRAM_STEPS * HISTOGRAM_STEPS; i++) {
    seen += h->counts[i];
    if (seen <= wanted) continue;
    if (i < HISTOGRAM_STEPS) return i;
    unsigned exponent = i / HISTOGRAM_STEPS + 5, step = i % HISTOGRAM_STEPS;
    double width = (double)(1ull << (exponent - 6));
    return (double)(1ull << exponent) + width * (step + 0.5);
  }
  return 0;
}

/* ---- Bytes that wait to be sent or parsed ------------------------------------------------------ */

struct bytes {
  uint8_t *data;
  size_t start, end, capacity;
};

static inline size_t bytes_length(const struct bytes *b) { return b->end - b->start; }

/* Makes room for `count` more bytes and returns where they go; `b->end` is the caller's to move. */
static inline uint8_t *bytes_reserve(struct bytes *b, size_t count) {
  if (b->start == b->end) b->start = b->end = 0;
  if (b->end + count > b->capacity && b->start > 0) {
    memmove(b->data, b->data + b->start, bytes_length(b));
    b->end -= b->start;
    b->start = 0;
  }
  if (b->end + count > b->capacity) {
    size_t capacity = b->capacity ? b->capacity : 4096;
    while (b->end + count > capacity) capacity *= 2;
    b->data = need(realloc(b->data, capacity));
    b->capacity = capacity;
  }
  return b->data + b->end;
}

static inline void bytes_put(struct bytes *b, const void *data, size_t count) {
  memcpy(bytes_reserve(b, count), data, count);
  b->end += count;
}

static inline void bytes_text(struct bytes *b, const char *text) {
  bytes_put(b, text, strlen(text));
}

static inline void bytes_free(struct bytes *b) {
  free(b->data);
  memset(b, 0, sizeof *b);
}

/* ---- Sockets ---------------------------------------------------------------------------------- */

static inline void make_prompt_socket(int fd) {
  int on = 1;
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static inline struct sockaddr_in loopback(int port) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

static inline int listen_on(int port) {
  struct sockaddr_in address = loopback(port);
  int on = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, 1024) != 0)
    die("cannot listen on port %d: %s", port, strerror(errno));
  make_prompt_socket(fd);
  return fd;
}

static inline int connect_to(int port) {
  struct sockaddr_in address = loopback(port);
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0)
    die("cannot connect to port %d: %s", port, strerror(errno));
  make_prompt_socket(fd);
  return fd;
}

static inline void poll_for(int poller, int operation, int fd, uint32_t events, void *owner) {
  struct epoll_event event = {.events = events, .data.ptr = owner};
  if (epoll_ctl(poller, operation, fd, &event) != 0) die("epoll_ctl: %s", strerror(errno));
}

enum flush { FLUSHED, BLOCKED, BROKEN };

static inline enum flush bytes_flush(struct bytes *b, int fd) {
  while (b->start < b->end) {
    ssize_t sent = send(fd, b->data + b->start, bytes_length(b), MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN ? BLOCKED : BROKEN;
    b->start += (size_t)sent;
  }
  b->start = b->end = 0;
  return FLUSHED;
}

/* Reads once. Returns bytes read, 0 when there is nothing now, -1 when the peer is gone. */
static inline ssize_t bytes_receive(struct bytes *b, int fd, size_t most) {
  ssize_t count = recv(fd, bytes_reserve(b, most), most, 0);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  if (count <= 0) return -1;
  b->end += (size_t)count;
  return count;
}

/* ---- Options: `name=value` arguments ------------------------------------------------------------ */

static inline const char *option(int count, char **arguments, const char *name,
                                 const char *otherwise) {
  size_t length = strlen(name);
  for (int i = 1; i < count; i++)
    if (strncmp(arguments[i], name, length) == 0 && arguments[i][length] == '=')
      return arguments[i] + length + 1;
  if (otherwise == NULL) die("missing argument: %s=", name);
  return otherwise;
}

/* ---- Marks ------------------------------------------------------------------------------------
 *
 * A prompt says how it is to be answered: `@@PACE:TOGETHER:TOKENS@@`, pace in microseconds per
 * token (0: all at once), together 1 when all streams tick at the same moments.
 * Each token's text says when it was sent: `~` 16 hex digits of now_ns `~`.
 */

struct pace {
  uint64_t pace_ns;
  bool together;
  unsigned tokens;
};

static inline struct pace find_pace(const uint8_t *data, size_t count) {
  struct pace found = {.tokens = 64};
  const char *mark = memmem(data, count, "@@", 2);
  unsigned long pace_us;
  unsigned together, tokens;
  char text[64] = "";
  if (mark == NULL) return found;
  size_t left = count - (size_t)((const uint8_t *)mark - data);
  memcpy(text, mark, left < sizeof text ? left : sizeof text - 1);
  if (sscanf(text, "@@%lu:%u:%u@@", &pace_us, &together, &tokens) == 3 && tokens > 0) {
    found.pace_ns = pace_us * NS_PER_US;
    found.together = together != 0;
    found.tokens = tokens;
  }
  return found;
}

#define STAMP_LENGTH 18

static inline void write_stamp(uint8_t *at, uint64_t time_ns) {
  static const char digits[] = "0123456789abcdef";
  at[0] = at[STAMP_LENGTH - 1] = '~';
  for (int i = STAMP_LENGTH - 2; i > 0; i--) {
    at[i] = (uint8_t)digits[time_ns & 15];
    time_ns >>= 4;
  }
}

/* The stamp at `at`, where STAMP_LENGTH bytes must be; 0 when there is none. */
static inline uint64_t read_stamp(const uint8_t *at) {
  uint64_t value = 0;
  if (at[0] != '~' || at[STAMP_LENGTH - 1] != '~') return 0;
  for (int i = 1; i < STAMP_LENGTH - 1; i++) {
    unsigned c = at[i];
    unsigned digit = c >= '0' && c <= '9' ? c - '0' : c - 'a' + 10;
    if (digit > 15) return 0;
    value = value << 4 | digit;
  }
  return value;
}

#endif
