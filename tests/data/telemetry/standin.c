/* A stand-in for the macOS calls that lumina_cache.telemetry.darwin makes, so that its prototypes, its ownership of
 * objects and its reading of lengths are exercised by a real C ABI on any system. Objects are handed out at full-width
 * addresses, and counted. */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

unsigned long vm_kernel_page_size = 16384;

/* what the test reads and sets */
int standin_live_cf = 0, standin_live_io = 0, standin_live_tokens = 0, standin_host_rights = 0;
int standin_registrations = 0, standin_accelerators = 2, standin_fail_notify = 0, standin_fail_host = 0;
int standin_reply_words = 38;
unsigned char standin_pages[152], standin_rusage[296], standin_swap[32];
int standin_level = 1;
uint64_t standin_memsize = 17179869184ull, standin_wired = 0, standin_state = 0;
int64_t standin_busy[2] = {12, 87};

int sysctlbyname(const char *name, void *old, size_t *length, void *new_value, size_t new_length) {
  const void *from = NULL;
  size_t size = 0;
  if (new_value != NULL || new_length != 0) { errno = EPERM; return -1; }
  if (!strcmp(name, "kern.memorystatus_vm_pressure_level")) { from = &standin_level; size = 4; }
  else if (!strcmp(name, "kern.memorystatus_level")) { static int share = 57; from = &share; size = 4; }
  else if (!strcmp(name, "hw.memsize")) { from = &standin_memsize; size = 8; }
  else if (!strcmp(name, "iogpu.wired_limit_mb")) { from = &standin_wired; size = 8; }
  else if (!strcmp(name, "hw.perflevel0.physicalcpu")) { static int cores = 10; from = &cores; size = 4; }
  else if (!strcmp(name, "machdep.cpu.brand_string")) { from = "Apple M4 Pro"; size = 13; }
  else if (!strcmp(name, "hw.model")) { from = "Mac16,8"; size = 8; }
  else if (!strcmp(name, "vm.swapusage")) { from = standin_swap; size = 32; }
  else { errno = ENOENT; return -1; }
  if (*length < size) { errno = ENOMEM; return -1; }
  memcpy(old, from, size);
  *length = size;
  return 0;
}

uint32_t mach_host_self(void) { return 0xF0000000u + (uint32_t)++standin_host_rights; }

int host_statistics64(uint32_t host, int flavor, int *info, uint32_t *count) {
  if (host != 0xF0000001u || flavor != 4 || *count < 38) return 4;
  if (standin_fail_host) return 5;
  memcpy(info, standin_pages, (size_t)standin_reply_words * 4);
  *count = (uint32_t)standin_reply_words;
  return 0;
}

int proc_pid_rusage(int pid, int flavor, void *buffer) {
  if (pid != getpid() || flavor != 4) { errno = ESRCH; return -1; }
  memcpy(buffer, standin_rusage, 296);
  return 0;
}

uint32_t notify_register_check(const char *key, int *token) {
  if (strncmp(key, "com.apple.system.", 17)) return 1;
  *token = 1000 + ++standin_registrations;
  standin_live_tokens++;
  return 0;
}
uint32_t notify_get_state(int token, uint64_t *state) {
  if (standin_fail_notify || token <= 1000) return 9;
  *state = standin_state;
  return 0;
}
uint32_t notify_cancel(int token) { (void)token; standin_live_tokens--; return 0; }

/* CoreFoundation: 1 string, 2 number, 3 dictionary */
typedef struct object { unsigned long type; int references; char text[64]; int64_t number; int busy_index; } object;

static object *create(unsigned long type) {
  object *made = calloc(1, sizeof *made);
  made->type = type;
  made->references = 1;
  standin_live_cf++;
  return made;
}
void CFRelease(void *given) {
  object *held = given;
  if (held == NULL || held->references < 1) abort();
  if (--held->references == 0) { standin_live_cf--; free(held); }
}
void *CFStringCreateWithCString(void *allocator, const char *text, uint32_t encoding) {
  if (allocator != NULL || encoding != 0x08000100u) return NULL;
  object *made = create(1);
  strncpy(made->text, text, sizeof made->text - 1);
  return made;
}
unsigned long CFGetTypeID(void *given) { return ((object *)given)->type; }
unsigned long CFDictionaryGetTypeID(void) { return 3; }
unsigned long CFNumberGetTypeID(void) { return 2; }
/* got, not created: the caller must not release it */
static object gotten[2][4];
const void *CFDictionaryGetValue(void *dictionary, void *key) {
  static const char *names[] = {"Device Utilization %", "In use system memory", "Alloc system memory", "recoveryCount"};
  object *held = dictionary, *wanted = key;
  if (held->type != 3 || wanted->type != 1) abort();
  for (int i = 0; i < 4; i++)
    if (!strcmp(wanted->text, names[i])) {
      object *value = &gotten[held->busy_index][i];
      value->references = 1000000;
      value->type = i == 3 ? 1 : 2; /* the last is no number */
      value->number = i == 0 ? standin_busy[held->busy_index] : (int64_t)(i + held->busy_index) << 33;
      return value;
    }
  return NULL;
}
unsigned char CFNumberGetValue(void *given, long type, void *value) {
  if (((object *)given)->type != 2 || type != 4) return 0;
  memcpy(value, &((object *)given)->number, 8);
  return 1;
}

/* IOKit: services are 0xE0000001..., the iterator is 0xD0000001 */
static int next_service = 0;
void *IOServiceMatching(const char *name) { return strcmp(name, "IOAccelerator") ? NULL : create(3); }
int IOServiceGetMatchingServices(uint32_t port, void *matching, uint32_t *iterator) {
  if (port != 0) abort();
  CFRelease(matching); /* consumed */
  next_service = 0;
  *iterator = 0xD0000001u;
  standin_live_io++;
  return 0;
}
uint32_t IOIteratorNext(uint32_t iterator) {
  if (iterator != 0xD0000001u) abort();
  if (next_service >= standin_accelerators) return 0;
  standin_live_io++;
  return 0xE0000001u + (uint32_t)next_service++;
}
void *IORegistryEntryCreateCFProperty(uint32_t service, void *key, void *allocator, uint32_t options) {
  if (allocator != NULL || options != 0 || strcmp(((object *)key)->text, "PerformanceStatistics")) return NULL;
  if (service < 0xE0000001u || service > 0xE0000002u) abort();
  object *made = create(3);
  made->busy_index = (int)(service - 0xE0000001u);
  return made;
}
int IOObjectRelease(uint32_t given) { (void)given; standin_live_io--; return 0; }
