/* What both load generators do: prompts, when to start and measure, whose CPU to count, figures.
 *
 *   port=PORT streams=N tokens=N mark=PACE:TOGETHER [prompt=BYTES] [warm_s=S] [measure_s=S]
 *   [spread_s=S] [watch=PID,PID.../PID.../...]
 *
 * A closed loop of `streams` requests: each one that ends starts the next. They start evenly over
 * `spread_s`; `warm_s` after the first start, and once all have started, everything is counted for
 * `measure_s`. The CPU time of each watched group of processes is read from their own clocks at both
 * ends of that window.
 */
#ifndef LOAD_H
#define LOAD_H

#include "common.h"

#define SHARED_PREFIXES 8
#define ERRORS_MOST 1000
#define GROUPS_MOST 8

struct load {
  int port;
  unsigned streams, tokens, prompt_bytes;
  const char *mark;
  const char *groups[GROUPS_MOST]; /* Process ids, separated by commas. */
  unsigned group_count;
  uint64_t warm_ns, measure_ns, spread_ns;
  char *prefixes[SHARED_PREFIXES];

  uint64_t began_ns, from_ns, until_ns; /* from_ns 0: not measuring yet. */
  unsigned started;
  uint64_t requests, received_tokens, errors;
  struct histogram ttft, reach, per_token, total;
  double group_cpu_s[GROUPS_MOST], own_cpu_s; /* At the beginning of the window. */
};

static uint64_t seconds_option(int count, char **arguments, const char *name,
                               const char *otherwise) {
  return (uint64_t)(atof(option(count, arguments, name, otherwise)) * 1e9);
}

static void load_read(struct load *load, int count, char **arguments) {
  load->port = atoi(option(count, arguments, "port", NULL));
  load->streams = (unsigned)atoi(option(count, arguments, "streams", NULL));
  load->tokens = (unsigned)atoi(option(count, arguments, "tokens", "64"));
  load->mark = option(count, arguments, "mark", "0:0");
  load->prompt_bytes = (unsigned)atoi(option(count, arguments, "prompt", "1000"));
  load->warm_ns = seconds_option(count, arguments, "warm_s", "1");
  load->measure_ns = seconds_option(count, arguments, "measure_s", "3");
  load->spread_ns = seconds_option(count, arguments, "spread_s", "0");
  char *groups = need(strdup(option(count, arguments, "watch", ""))), *group;
  while ((group = strsep(&groups, "/")) != NULL) {
    if (load->group_count == GROUPS_MOST) die("too many groups of processes");
    load->groups[load->group_count++] = group;
  }
  chance_state ^= now_ns();
  for (unsigned i = 0; i < SHARED_PREFIXES; i++) {
    char *text = load->prefixes[i] = need(malloc(load->prompt_bytes + 1));
    for (unsigned k = 0; k < load->prompt_bytes; k++)
      text[k] = k % 6 == 5 ? ' ' : (char)('a' + chance() % 26);
    text[load->prompt_bytes] = '\0';
  }
}

#define PROMPT_MOST(load) ((load)->prompt_bytes + 96)

/* Writes a prompt: one of a few beginnings that requests share, and an end that none shares. */
static size_t write_prompt(const struct load *load, char *at) {
  const char *prefix = load->prefixes[chance() % SHARED_PREFIXES];
  return (size_t)sprintf(at, "@@%s:%u@@ %s %016llx", load->mark, load->tokens, prefix,
                         (unsigned long long)chance());
}

/* Whether one more stream is to be started now. */
static bool load_may_start(const struct load *load) {
  if (load->started == load->streams) return false;
  return now_ns() - load->began_ns >= load->spread_ns * load->started / load->streams;
}

/* When something is to be done even if nothing is received. */
static uint64_t load_next_ns(const struct load *load) {
  if (load->started < load->streams)
    return load->began_ns + load->spread_ns * load->started / load->streams;
  return load->from_ns ? load->until_ns : load->began_ns + load->warm_ns;
}

/* Opens and closes the window; true once it is closed. */
static bool load_is_over(struct load *load) {
  uint64_t now = now_ns();
  if (load->from_ns) return now >= load->until_ns;
  if (load->started < load->streams || now < load->began_ns + load->warm_ns) return false;
  for (unsigned i = 0; i < load->group_count; i++)
    load->group_cpu_s[i] = cpu_of_all(load->groups[i]);
  load->own_cpu_s = cpu_of(getpid());
  load->from_ns = now_ns();
  load->until_ns = load->from_ns + load->measure_ns;
  return false;
}

static void count_token(struct load *load, uint64_t now, uint64_t sent_ns) {
  if (!load->from_ns) return;
  load->received_tokens++;
  if (sent_ns) histogram_add(&load->per_token, now > sent_ns ? now - sent_ns : 0);
}

/* Also requests that began before the window are counted; of those, no times are taken. */
static void count_first(struct load *load, uint64_t now, uint64_t asked_ns, uint64_t sent_ns) {
  if (!load->from_ns || asked_ns < load->from_ns) return;
  histogram_add(&load->ttft, now - asked_ns);
  if (sent_ns > asked_ns) histogram_add(&load->reach, sent_ns - asked_ns);
}

static void count_request(struct load *load, uint64_t asked_ns) {
  if (!load->from_ns) return;
  load->requests++;
  if (asked_ns >= load->from_ns) histogram_add(&load->total, now_ns() - asked_ns);
}

/* Counts a request that did not end as it should; says why for the first. */
static void count_error(struct load *load, const char *problem, const void *seen, size_t length) {
  if (load->errors++ == 0)
    fprintf(stderr, "%s: %.*s\n", problem, (int)(length < 600 ? length : 600),
            (const char *)seen);
  if (load->errors >= ERRORS_MOST) die("too many errors");
}

static void load_print(const struct load *load) {
  double seconds = (double)(now_ns() - load->from_ns) / 1e9;
  double own_s = cpu_of(getpid()) - load->own_cpu_s;
  printf("{\"seconds\": %.4f, \"requests\": %llu, \"tokens\": %llu, \"errors\": %llu", seconds,
         (unsigned long long)load->requests, (unsigned long long)load->received_tokens,
         (unsigned long long)load->errors);
  printf(", \"ttft_us_p50\": %.1f, \"ttft_us_p99\": %.1f",
         histogram_quantile(&load->ttft, 0.5) / 1e3, histogram_quantile(&load->ttft, 0.99) / 1e3);
  printf(", \"reach_us_p50\": %.1f", histogram_quantile(&load->reach, 0.5) / 1e3);
  printf(", \"token_us_p50\": %.1f, \"token_us_p99\": %.1f",
         histogram_quantile(&load->per_token, 0.5) / 1e3,
         histogram_quantile(&load->per_token, 0.99) / 1e3);
  printf(", \"request_us_p50\": %.1f, \"request_us_p99\": %.1f",
         histogram_quantile(&load->total, 0.5) / 1e3,
         histogram_quantile(&load->total, 0.99) / 1e3);
  printf(", \"load_cpu_s\": %.6f, \"watched_cpu_s\": [", own_s);
  for (unsigned i = 0; i < load->group_count; i++)
    printf("%s%.6f", i ? ", " : "", cpu_of_all(load->groups[i]) - load->group_cpu_s[i]);
  puts("]}");
}

#endif
